"""Published draft heads: their files, read into one internal record, and their forwards."""
