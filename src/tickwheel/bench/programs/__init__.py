"""Programs that run in the environment of one library, without Tickwheel: see drive.py."""
