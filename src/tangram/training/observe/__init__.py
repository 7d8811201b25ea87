"""What a run tells: events, progress, tables, TensorBoard, profiles."""
