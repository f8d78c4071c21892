"""Where objects lie, and how each kind of store is asked: a folder, a bucket, any other file system."""
