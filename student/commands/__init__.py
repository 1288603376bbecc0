"""The verbs of the command line that the student adds."""
