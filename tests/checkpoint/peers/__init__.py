"""Other projects' own code: what they save is read here, and what is written here they load."""
