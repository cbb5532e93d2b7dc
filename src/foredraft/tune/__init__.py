"""tune: search for the sub-layers that a model skips while it drafts for itself."""
