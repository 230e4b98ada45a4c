"""All measurements of one subject and method, and the table of all of them."""
