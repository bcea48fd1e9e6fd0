"""The web application: the address, keys, connections, and the way of a request from its path to its answer."""
