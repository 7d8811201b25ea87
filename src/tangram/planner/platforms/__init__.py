"""Job files that run a plan: one module a platform, over what a plan needs of one (`platforms.jobs`)."""
