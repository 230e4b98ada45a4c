"""The page cache: what of a file lies in it, how to empty and fill it, and how both are proved."""
