//! Scaling curves as SVG, alone or in an HTML page with nothing loaded from elsewhere.

use std::path::Path;

use plotters::prelude::*;

use super::Outcome;
use super::point::Point;
use crate::{Error, Result};

/// Width and height of a plot in pixels.
const SIZE: (u32, u32) = (820, 420);

/// A curve: its name and its points.
type Curve = (String, Vec<(f64, f64)>);

/// What goes into a file of this name.
///
/// Errors: [`Error::Usage`] unless it ends in `.svg` or `.html`.
pub(super) fn document(path: &Path, outcome: &Outcome) -> Result<String> {
    let throughput =
        || plot(&outcome.title, "samples/s", &curves(outcome, |point| point.samples_per_s));
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg") => throughput(),
        Some("html") => {
            let efficiency = plot(
                "Throughput of a rank against that on the fewest ranks",
                "efficiency, %",
                &curves(outcome, |point| point.efficiency.map(|share| 100.0 * share)),
            )?;
            let (title, throughput) = (escape(&outcome.title), throughput()?);
            Ok(format!(
                "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}\
                 </title><style>body{{font-family:sans-serif;max-width:60em;margin:2em auto}}\
                 </style></head>\n<body><h1>{title}</h1>\n{throughput}\n{efficiency}\n</body></html>\n",
            ))
        }
        _ => Err(Error::Usage(format!(
            "--plot {}: a name that ends in .svg or .html is needed",
            path.display()
        ))),
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn curves(outcome: &Outcome, value: impl Fn(&Point) -> Option<f64>) -> Vec<Curve> {
    let mut curves: Vec<Curve> = Vec::new();
    for point in &outcome.points {
        let Some(value) = value(point) else { continue };
        let at = (point.ranks as f64, value);
        match curves.iter_mut().find(|(name, _)| *name == point.scenario) {
            Some((_, points)) => points.push(at),
            None => curves.push((point.scenario.clone(), vec![at])),
        }
    }
    curves
}

/// A plot over ranks, whose axis is logarithmic.
fn plot(title: &str, unit: &str, curves: &[Curve]) -> Result<String> {
    let all = || curves.iter().flat_map(|(_, points)| points);
    let low = all().map(|at| at.0).fold(f64::INFINITY, f64::min).clamp(1.0, 1e9);
    let high = all().map(|at| at.0).fold(low * 1.01, f64::max);
    let top = all().map(|at| at.1).fold(f64::MIN_POSITIVE, f64::max) * 1.1;
    let mut svg = String::new();
    draw(&mut svg, title, unit, curves, (low..high, 0.0..top))
        .map_err(|error| Error::Usage(format!("--plot: nothing to draw: {error}")))?;
    Ok(svg)
}

fn draw(
    svg: &mut String,
    title: &str,
    unit: &str,
    curves: &[Curve],
    (x, y): (std::ops::Range<f64>, std::ops::Range<f64>),
) -> Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(80)
        .build_cartesian_2d(x.log_scale().base(2.0), y)?;
    chart
        .configure_mesh()
        .x_desc("ranks")
        .y_desc(unit)
        .x_label_formatter(&|ranks| format!("{ranks:.0}"))
        .y_label_formatter(&|value| {
            if *value >= 1e5 { format!("{value:.1e}") } else { format!("{value:.0}") }
        })
        .draw()?;
    for (index, (name, points)) in curves.iter().enumerate() {
        let color = Palette99::pick(index).to_rgba();
        chart
            .draw_series(LineSeries::new(points.iter().copied(), color.stroke_width(2)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2)));
        let dots = points.iter().map(|&at| Circle::new(at, 3, color.filled()));
        chart.draw_series(dots)?;
    }
    chart
        .configure_series_labels()
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .position(SeriesLabelPosition::UpperLeft)
        .draw()?;
    area.present()?;
    Ok(())
}
