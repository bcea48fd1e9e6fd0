"""The graph of ops of a module's forward pass, traced from the module and divided into stages."""
