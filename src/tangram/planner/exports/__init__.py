"""A strategy in other projects' own words: one module a project, over the numbers of `exports.numbers`."""
