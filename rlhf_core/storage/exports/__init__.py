"""What leaves the log for other software: files, and the place that they are written to."""
