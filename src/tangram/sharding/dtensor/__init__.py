"""The op rules for people who use torch's DTensor: `export.dtensor.register()` puts them in the place of its own."""
