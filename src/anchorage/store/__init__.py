"""The store: arithmetic of rows and shards, file format, staging, manifest, reader, verification."""
