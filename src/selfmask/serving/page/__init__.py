"""The page at `/`: files without a build step, and the routes that they ask."""
