"""Pages and pictures of profiles and traces, and how a page is written."""
