"""The page cache measured by accident: what a benchmark that drops nothing really measures."""
