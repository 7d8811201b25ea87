"""What people see of a trace: a report, a page, Perfetto's file, two traces side by side, a live view."""
