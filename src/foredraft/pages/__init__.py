"""Self-contained HTML pages made from the library's records; a page loads nothing from anywhere."""
