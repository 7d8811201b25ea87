"""How accurate an operator is: errors in ulps against float64, and a class that says whether it is right.

    ulps       errors in units of the last place of a result's own type; their histogram
    bounds     how far rounding may carry an operator of a class of algorithms
    judge      an outcome: histogram, class, digest of the bits
    laws       what inputs are drawn from
    operator   an operator: how it is called, what is true, on which inputs it is tried
    pointwise, reductions, products, attention, copies    the operators, as tables
    sheet      outcomes as a file; `compare`: two of them
    sweep, settings, tables, usage, page, shown    the bench: all operators, other settings, what is printed

What is true is computed in float64 from the inputs as they were rounded, and by other formulas than torch's where
these lose digits. Trade-off: float64 is the limit: what lies within 1e-6 ulp of half is not told from half.
"""
