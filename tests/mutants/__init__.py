"""Small faults to plant in the library, and a command that says which tests find them."""
