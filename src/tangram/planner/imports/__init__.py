"""A strategy from other projects' own files, so that `tangram plan explain FILE` can say what to expect of it."""
