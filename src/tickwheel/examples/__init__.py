"""Examples to read and copy; `tickwheel demo` runs them.

`shop` is what a user writes. `story` drives it through a busy day, `account` checks every order at
the end, `view` draws it.
"""
