"""Commands as jobs of engines that exist already. Nothing here schedules."""
