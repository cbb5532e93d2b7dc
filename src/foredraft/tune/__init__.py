"""tune: which sub-layers a model can leave out while it drafts for itself, found by search."""
