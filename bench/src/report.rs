//! The report: one HTML file with its plots inside, nothing loaded from elsewhere.

use plotters::coord::ranged1d::{Ranged, ValueFormatter};
use plotters::prelude::*;

use crate::document::{Document, Figures, Point};
use crate::stats::tail_curve;
use crate::{BenchError, Result};

/// Width and height of a plot in pixels.
const SIZE: (u32, u32) = (760, 380);

/// A curve: its name and its points.
pub(crate) type Curve = (String, Vec<(f64, f64)>);

/// The report as HTML.
///
/// Errors: [`BenchError::Plot`].
pub fn html<P: Figures>(document: &Document<P>) -> Result<String> {
    let title = format!("tessera-bench {}", document.command);
    Ok(format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\
         <style>body{{font-family:sans-serif;max-width:60em;margin:2em auto}}\
         pre{{overflow-x:auto;background:#f4f4f4;padding:1em}}</style></head>\n\
         <body><h1>{title}</h1>\n<pre>{}</pre>\n{}\n<h2>Knobs</h2>\n<pre>{}</pre>\n</body></html>\n",
        escape(&document.to_string()),
        P::plots(&document.points)?.join("\n"),
        escape(&format!("{:#}", document.knobs)),
    ))
}

/// The plots of requests: latency, and throughput against what was swept.
///
/// Errors: [`BenchError::Plot`].
pub(crate) fn request_plots(points: &[Point]) -> Result<Vec<String>> {
    let mut plots = vec![plot(
        "Latency beyond a quantile",
        "1 / (1 - quantile): 2 is the median, 100 is p99",
        "ms",
        &latency_curves(points),
    )?];
    let by_batch = sweep(points, |point| point.batch as f64, |point| point.pooling.clone());
    if by_batch.iter().any(|(_, points)| points.len() > 1) {
        let named = named("pooling", by_batch);
        plots.push(plot("Throughput against batch", "samples a request", "Mrows/s", &named)?);
    }
    let by_pooling = sweep(points, |point| point.ids_per_bag, |point| point.batch.to_string());
    if by_pooling.iter().any(|(_, points)| points.len() > 1) {
        let named = named("batch", by_pooling);
        plots.push(plot("Throughput against pooling", "ids a bag", "Mrows/s", &named)?);
    }
    Ok(plots)
}

fn latency_curves(points: &[Point]) -> Vec<Curve> {
    let curve = |point: &Point| {
        let seconds: Vec<f64> = point.latencies_ms.iter().map(|ms| ms / 1e3).collect();
        let name = format!("batch {}, pooling {}", point.batch, point.pooling);
        (name, tail_curve(&seconds))
    };
    points.iter().map(curve).collect()
}

/// Throughput over `x`, a curve for each value of `group`.
fn sweep(
    points: &[Point],
    x: impl Fn(&Point) -> f64,
    group: impl Fn(&Point) -> String,
) -> Vec<Curve> {
    let mut curves: Vec<Curve> = Vec::new();
    for point in points {
        let (name, at) = (group(point), (x(point), point.rows_per_s / 1e6));
        match curves.iter_mut().find(|(known, _)| *known == name) {
            Some((_, points)) => points.push(at),
            None => curves.push((name, vec![at])),
        }
    }
    for (_, points) in &mut curves {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    curves
}

fn named(what: &str, curves: Vec<Curve>) -> Vec<Curve> {
    curves.into_iter().map(|(name, points)| (format!("{what} {name}"), points)).collect()
}

/// A plot with a logarithmic x axis, as SVG.
pub(crate) fn plot(title: &str, x: &str, y: &str, curves: &[Curve]) -> Result<String> {
    let all = || curves.iter().flat_map(|(_, points)| points);
    let low = all().map(|at| at.0).fold(f64::INFINITY, f64::min).max(1e-9);
    let high = all().map(|at| at.0).fold(low * 1.01, f64::max);
    let top = all().map(|at| at.1).fold(f64::MIN_POSITIVE, f64::max) * 1.1;
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        area.fill(&WHITE).map_err(failed)?;
        let chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(60)
            .build_cartesian_2d((low..high).log_scale(), 0.0..top)
            .map_err(failed)?;
        draw(chart, x, y, curves)?;
        area.present().map_err(failed)?;
    }
    Ok(svg)
}

fn draw<'a, X, Y>(
    mut chart: ChartContext<'a, SVGBackend<'a>, Cartesian2d<X, Y>>,
    x: &str,
    y: &str,
    curves: &[Curve],
) -> Result<()>
where
    X: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    chart.configure_mesh().x_desc(x).y_desc(y).draw().map_err(failed)?;
    for (i, (name, points)) in curves.iter().enumerate() {
        let color = Palette99::pick(i).to_rgba();
        chart
            .draw_series(LineSeries::new(points.iter().copied(), color.stroke_width(2)))
            .map_err(failed)?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2)));
        if points.len() < 20 {
            let dots = points.iter().map(|&at| Circle::new(at, 3, color.filled()));
            chart.draw_series(dots).map_err(failed)?;
        }
    }
    chart
        .configure_series_labels()
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .position(SeriesLabelPosition::UpperLeft)
        .draw()
        .map_err(failed)
}

fn failed(error: impl std::fmt::Display) -> BenchError {
    BenchError::Plot(error.to_string())
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
