"""Connections between layers that replace the residual sum: attention residuals and hyper-connections."""
