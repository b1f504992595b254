"""What is kept within a budget: which entries go first, what is loaded next, and the tiers of memory over disk."""
