"""From one format, structure or precision to another; adapters merged; object stores."""
