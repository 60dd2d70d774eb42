"""The embedding and the sorted sums behind its gradient."""
