"""Files that lie, and a pickle that would run code: each is refused."""
