"""Hooking the package into training frameworks without editing them."""
