"""Code that the recipes share: data, packing, rollouts, rewards, run folders."""
