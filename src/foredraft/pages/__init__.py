"""Pages: self-contained HTML made of the library's records. Each loads nothing from anywhere."""
