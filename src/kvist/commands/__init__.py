"""The commands of the command line, a module each kind: their options, and what they call."""
