"""The dashboard: pages for people, on top of the HTTP API."""

# It says what to install, if its libraries are not there.
import tickwheel.http  # noqa: F401
