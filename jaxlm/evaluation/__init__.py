"""Validation, generation and reports."""
