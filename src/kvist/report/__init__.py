"""Answers for the eye, from plain rows."""
