"""What the small models of the recipes learn, with its judge: nothing is fetched."""
