"""Files: written atomically, checked for damage, inspected or shared."""
