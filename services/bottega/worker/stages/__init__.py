"""Stages as roles: a worker without text encoders or a VAE decoder asks workers that compute only this stage."""
