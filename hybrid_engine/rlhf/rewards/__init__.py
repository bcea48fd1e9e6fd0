"""Everything that gives a number to a response: rules, functions of the user's, reward models, and their sum."""
