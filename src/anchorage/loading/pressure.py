"""Under a memory limit mapped pages are dropped and read again; private copies are not."""
