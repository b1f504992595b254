"""The engine: its loop of turns, the choice of groups, denoising steps, and the stages before and after them."""
