"""How a product of reflections is computed. README.md beside this file has the derivation."""
