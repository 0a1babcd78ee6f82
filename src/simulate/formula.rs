//! Formulas of a simulation file: `150 + 0.674 * N`.
//!
//! ```text
//! sum     = product { ("+" | "-") product }
//! product = factor { ("*" | "/") factor }
//! factor  = "-" factor | number | name | call | "(" sum ")"
//! call    = ("min" | "max" | "log2" | "ceil") "(" sum { "," sum } ")"
//! ```

use std::collections::BTreeMap;
use std::fmt;

/// Values of names.
pub type Values = BTreeMap<String, f64>;

/// Deepest nesting of a formula: more is a mistake, and would overflow the stack.
const DEPTH_MAX: usize = 64;

/// A number, or how to compute one.
#[derive(Clone, Debug, PartialEq)]
pub struct Formula {
    text: String,
    root: Node,
}

#[derive(Clone, Debug, PartialEq)]
enum Node {
    Number(f64),
    Name(String),
    Negative(Box<Node>),
    Binary(char, Box<Node>, Box<Node>),
    Call(Function, Vec<Node>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Function {
    Min,
    Max,
    Log2,
    Ceil,
}

impl From<f64> for Formula {
    fn from(number: f64) -> Self {
        Self { text: number.to_string(), root: Node::Number(number) }
    }
}

impl fmt::Display for Formula {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::str::FromStr for Formula {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parser = Parser { text, at: 0, depth: 0 };
        let root = parser.sum()?;
        match parser.peek() {
            None => Ok(Self { text: text.to_owned(), root }),
            Some(found) => Err(parser.fault(&format!("an operator was expected, not `{found}`"))),
        }
    }
}

impl Formula {
    /// Whether it is the number 0.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.root == Node::Number(0.0)
    }

    /// Names in it.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        let mut names = Vec::new();
        collect(&self.root, &mut names);
        names
    }

    /// Its value; every name of [`Formula::names`] must be in `values`. May be infinite or NaN.
    #[must_use]
    pub fn value(&self, values: &Values) -> f64 {
        value(&self.root, values)
    }
}

fn collect<'f>(node: &'f Node, names: &mut Vec<&'f str>) {
    match node {
        Node::Number(_) => {}
        Node::Name(name) => names.push(name),
        Node::Negative(inner) => collect(inner, names),
        Node::Binary(_, left, right) => {
            collect(left, names);
            collect(right, names);
        }
        Node::Call(_, arguments) => arguments.iter().for_each(|node| collect(node, names)),
    }
}

fn value(node: &Node, values: &Values) -> f64 {
    match node {
        Node::Number(number) => *number,
        Node::Name(name) => values.get(name).copied().unwrap_or(f64::NAN),
        Node::Negative(inner) => -value(inner, values),
        Node::Binary(operator, left, right) => {
            let (left, right) = (value(left, values), value(right, values));
            match operator {
                '+' => left + right,
                '-' => left - right,
                '*' => left * right,
                _ => left / right,
            }
        }
        Node::Call(function, arguments) => {
            let mut arguments = arguments.iter().map(|node| value(node, values));
            let first = arguments.next().unwrap_or(f64::NAN);
            match function {
                Function::Min => arguments.fold(first, f64::min),
                Function::Max => arguments.fold(first, f64::max),
                Function::Log2 => first.log2(),
                Function::Ceil => first.ceil(),
            }
        }
    }
}

struct Parser<'t> {
    text: &'t str,
    at: usize,
    depth: usize,
}

impl Parser<'_> {
    fn peek(&mut self) -> Option<char> {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start().len();
        self.text[self.at..].chars().next()
    }

    fn take(&mut self, wanted: &[char]) -> Option<char> {
        let found = self.peek().filter(|found| wanted.contains(found))?;
        self.at += found.len_utf8();
        Some(found)
    }

    /// The longest piece of characters that `belongs` accepts.
    fn piece(&mut self, belongs: impl Fn(char) -> bool) -> String {
        let rest = &self.text[self.at..];
        let length = rest.find(|c| !belongs(c)).unwrap_or(rest.len());
        self.at += length;
        rest[..length].to_owned()
    }

    fn fault(&self, what: &str) -> String {
        format!("`{}`: {what} (character {})", self.text, self.at + 1)
    }

    fn sum(&mut self) -> Result<Node, String> {
        let mut left = self.product()?;
        while let Some(operator) = self.take(&['+', '-']) {
            left = Node::Binary(operator, Box::new(left), Box::new(self.product()?));
        }
        Ok(left)
    }

    fn product(&mut self) -> Result<Node, String> {
        let mut left = self.factor()?;
        while let Some(operator) = self.take(&['*', '/']) {
            left = Node::Binary(operator, Box::new(left), Box::new(self.factor()?));
        }
        Ok(left)
    }

    fn factor(&mut self) -> Result<Node, String> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(self.fault("it is nested too deep"));
        }
        let node = match self.peek() {
            Some('-') => {
                self.at += 1;
                Ok(Node::Negative(Box::new(self.factor()?)))
            }
            Some('(') => {
                self.at += 1;
                let inner = self.sum()?;
                self.closed(inner)
            }
            Some(c) if c.is_ascii_digit() || c == '.' => self.number(),
            Some(c) if c.is_alphabetic() => self.name(),
            _ => Err(self.fault("a number, a name or `(` was expected")),
        };
        self.depth -= 1;
        node
    }

    fn closed(&mut self, node: Node) -> Result<Node, String> {
        match self.take(&[')']) {
            Some(_) => Ok(node),
            None => Err(self.fault("`)` was expected")),
        }
    }

    fn number(&mut self) -> Result<Node, String> {
        let mut digits = self.piece(|c| c.is_ascii_digit() || c == '.' || c == '_');
        let rest = &self.text[self.at..];
        let exponent =
            rest.strip_prefix(['e', 'E']).map(|rest| rest.trim_start_matches(['+', '-']));
        if exponent.is_some_and(|digits| digits.starts_with(|c: char| c.is_ascii_digit())) {
            digits.push('e');
            self.at += 1;
            digits += &self.piece(|c| c == '+' || c == '-');
            digits += &self.piece(|c| c.is_ascii_digit());
        }
        let number = digits.replace('_', "").parse();
        number.map(Node::Number).map_err(|_| self.fault(&format!("`{digits}` is no number")))
    }

    fn name(&mut self) -> Result<Node, String> {
        let name = self.piece(|c| c.is_alphanumeric() || c == '_');
        if self.take(&['(']).is_none() {
            return Ok(Node::Name(name));
        }
        let function = match name.as_str() {
            "min" => Function::Min,
            "max" => Function::Max,
            "log2" => Function::Log2,
            "ceil" => Function::Ceil,
            _ => return Err(self.fault(&format!("`{name}` is not one of min, max, log2 and ceil"))),
        };
        let mut arguments = vec![self.sum()?];
        while self.take(&[',']).is_some() {
            arguments.push(self.sum()?);
        }
        if matches!(function, Function::Log2 | Function::Ceil) && arguments.len() > 1 {
            return Err(self.fault(&format!("`{name}` takes one value")));
        }
        self.closed(Node::Call(function, arguments))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evaluate(text: &str) -> f64 {
        let values = [("W", 1536.0), ("N", 384.0)].map(|(name, value)| (name.to_owned(), value));
        text.parse::<Formula>().unwrap().value(&values.into())
    }

    #[test]
    fn formulas_have_the_values_of_arithmetic() {
        for (text, wanted) in [
            ("150 + 0.674 * N", 150.0 + 0.674 * 384.0),
            ("8 - 2 - 1", 5.0),
            ("16 / 4 / 2", 2.0),
            ("-(2 + 3) * -2", 10.0),
            ("max(1, W / N, 3)", 4.0),
            ("min(W, 7)", 7.0),
            ("log2(W / 192)", 3.0),
            ("ceil(W / 1000)", 2.0),
            (" 1.7e12 / 1_000_000 ", 1.7e6),
            ("2e-3*1E3", 2.0),
        ] {
            assert_eq!(evaluate(text), wanted, "{text}");
        }
        assert!(evaluate("W / 0").is_infinite());
        assert_eq!("1 + W * (N - W)".parse::<Formula>().unwrap().names(), ["W", "N", "W"]);
        assert!(Formula::from(0.0).is_zero() && !Formula::from(1.0).is_zero());
    }

    #[test]
    fn what_is_no_formula_is_refused_with_its_place() {
        for (text, part) in [
            ("", "a number, a name or `(` was expected (character 1)"),
            ("1 +", "expected (character 4)"),
            ("(1", "`)` was expected"),
            ("2 W", "an operator was expected, not `W`"),
            ("sin(1)", "`sin` is not one of min"),
            ("log2(1, 2)", "takes one value"),
            ("1.2.3", "`1.2.3` is no number"),
            ("2 $ 3", "not `$`"),
        ] {
            let said = text.parse::<Formula>().unwrap_err();
            assert!(said.contains(part), "{text}: {said}");
        }
        let deep = "(".repeat(100_000);
        assert!(deep.parse::<Formula>().unwrap_err().contains("nested too deep"));
        let deep = "-".repeat(100_000);
        assert!(deep.parse::<Formula>().unwrap_err().contains("nested too deep"));
    }
}
