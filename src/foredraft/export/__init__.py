"""Export: a head in the formats of other engines, value for value."""
