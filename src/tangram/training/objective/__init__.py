"""What a step minimises: the loss, router losses, expert capacity, packed documents; and whether a step is applied."""
