"""The block formats, one module each. A module whose name starts with an underscore is shared code, not a format."""
