"""Losses, class weights and metrics, and the forward that computes them."""
