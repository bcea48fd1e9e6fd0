"""From a plan to modules that compute on parts."""
