"""What runs inside the sandbox's process, before and around the code of the policy: standard library only.

The process is started as ``python -S -c "... from confined.child import main"``, so nothing here may import this
project by name.
"""
