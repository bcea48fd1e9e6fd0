"""Rows that are drawn each by its own options."""
