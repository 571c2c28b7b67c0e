"""Definitions of everyday words in simple words, written for this model: word = what it is."""

from __future__ import annotations

_TEXT = """
cat = a small animal with soft fur that many people keep as a pet; dog = an animal that barks and is a good friend of people; horse = a large animal that people ride;
cow = a large farm animal that gives milk; pig = a farm animal with a flat nose and a curly tail; sheep = a farm animal that gives wool; goat = a farm animal with horns and a beard;
chicken = a farm bird that lays eggs; duck = a bird that swims on water and quacks; rabbit = a small animal with long ears that hops; mouse = a very small animal with a long tail;
fox = a wild animal with red fur and a bushy tail; wolf = a wild animal that looks like a big dog; bear = a large wild animal with thick fur; lion = a big wild cat that roars;
tiger = a big wild cat with stripes; elephant = a very large animal with a long trunk; giraffe = a tall animal with a very long neck; zebra = an animal like a horse with black and white stripes;
monkey = an animal that climbs trees and has a long tail; kangaroo = an animal from Australia that jumps on its strong back legs; owl = a bird that hunts at night; eagle = a large bird with sharp eyes and claws;
penguin = a bird that swims well but cannot fly; parrot = a colourful bird that can learn to speak; frog = a small green animal that jumps and lives near water; snake = a long animal without legs;
turtle = a slow animal with a hard shell; shark = a large fish with sharp teeth; whale = a very large animal that lives in the sea; dolphin = a clever animal that lives in the sea and jumps out of the water;
octopus = a sea animal with eight arms; bee = an insect that makes honey; ant = a tiny insect that lives in a large group; spider = a small animal with eight legs that makes webs; butterfly = an insect with large colourful wings;
fish = an animal that lives in water and breathes with gills; bird = an animal with wings and feathers; insect = a small animal with six legs; pet = an animal that people keep at home;
bicycle = a vehicle with two wheels that you move with your feet; car = a vehicle with four wheels and an engine; train = a long vehicle that runs on rails; bus = a large vehicle that carries many people;
ship = a large boat that travels on the sea; boat = a small vehicle that travels on water; airplane = a machine with wings that flies; rocket = a machine that flies into space; bridge = a structure that carries a road over a river;
tunnel = a way for roads or trains under the ground; lighthouse = a tower with a light that guides ships; castle = a large old building with thick walls; house = a building where people live; tent = a shelter made of cloth;
library = a place where you can read and borrow books; museum = a place that shows old or beautiful things; school = a place where children learn; hospital = a place where ill people get help; market = a place where people buy and sell things;
bakery = a shop that sells bread and cakes; restaurant = a place where people pay to eat meals; garden = a piece of land where people grow plants; park = a green place in a town where people walk and play;
farm = a place where people grow food and keep animals; factory = a building where things are made with machines; bank = a place that keeps money; hotel = a place where travellers sleep; shop = a place where people buy things;
clock = an instrument that shows the time; watch = a small clock that you wear on your arm; calendar = a list of the days and months of a year; map = a picture that shows where places are; compass = an instrument that points to the north;
telescope = an instrument for looking at things that are far away, such as stars; microscope = an instrument for looking at very small things; camera = a machine that takes pictures; mirror = a piece of glass in which you see yourself;
window = an opening in a wall with glass that lets in light; door = a thing that you open to go into a room; key = a small piece of metal that opens a lock; lock = a thing that keeps a door closed; table = a piece of furniture with a flat top and legs;
chair = a piece of furniture to sit on; bed = a piece of furniture to sleep on; lamp = a thing that gives light; candle = a stick of wax that burns and gives light; pencil = a thin stick of wood for writing and drawing;
pen = a thing for writing with ink; book = many pages with text that are bound together; newspaper = sheets of paper with the news of the day; letter = a written message that you send to somebody; dictionary = a book that explains words;
computer = a machine that works with data and follows programs; keyboard = the part of a computer with keys for typing; phone = a machine for talking to people who are far away; radio = a machine that plays music and news from the air;
television = a machine that shows moving pictures; battery = a thing that stores electricity; magnet = a piece of metal that attracts iron; robot = a machine that can do work by itself; hammer = a tool for hitting nails; saw = a tool with teeth for cutting wood;
ladder = a tool with steps for climbing up; wheel = a round thing that turns and helps things move; engine = a machine that makes things move; thermometer = an instrument that measures temperature; ruler = a straight tool for measuring length;
knife = a tool with a sharp blade for cutting; spoon = a tool for eating soup; fork = a tool with points for eating; plate = a flat dish for food; cup = a small container for drinks; kettle = a pot for boiling water;
oven = a hot box for baking food; refrigerator = a cold box that keeps food fresh; umbrella = a thing that keeps you dry in the rain; coat = warm clothes that you wear outside; hat = a thing that you wear on your head;
shoe = a thing that you wear on your foot; scarf = a long piece of cloth that keeps your neck warm; ring = a round piece of jewellery for a finger; violin = a musical instrument with four strings and a bow;
guitar = a musical instrument with six strings; piano = a large musical instrument with black and white keys; drum = a musical instrument that you hit; flute = a musical instrument that you blow; painting = a picture made with paint;
statue = a figure made of stone or metal; ball = a round thing for playing games; kite = a toy that flies in the wind on a string; pillow = a soft thing for your head in bed; blanket = a warm cover for a bed; broom = a brush with a long handle for sweeping the floor;
rope = a strong thick string; basket = a container made of thin wood or straw; bottle = a container for liquids with a narrow neck; box = a container with four sides and a lid; bag = a soft container for carrying things; money = what people use to buy things;
rain = water that falls from the clouds; snow = soft white ice that falls from the sky in winter; wind = air that moves; thunder = the loud noise that follows lightning; lightning = a flash of light in the sky during a storm;
fog = a thick cloud near the ground; rainbow = an arc of colours in the sky after rain; cloud = many small drops of water in the sky; storm = bad weather with strong wind and rain; earthquake = a strong shaking of the ground;
volcano = a mountain that can throw out hot rock and ash; mountain = a very high hill; valley = the low land between hills or mountains; river = a long stream of water that flows to the sea; lake = a large area of water with land around it;
ocean = a very large area of salt water; beach = the land with sand next to the sea; island = a piece of land with water all around it; desert = a dry place with very little rain; forest = a large area with many trees; jungle = a hot and wet forest with many plants;
waterfall = a place where a river falls down from a height; glacier = a large mass of ice that moves slowly; cave = a large hole in a mountain or under the ground; sun = the star that gives us light and heat; moon = the round body that moves around the earth;
star = a ball of hot gas far away in space; planet = a large round body that moves around a star; comet = a ball of ice and dust with a long tail that moves around the sun; galaxy = a huge group of stars; sky = the space above the earth where we see clouds and stars;
water = a clear liquid that we drink; ice = frozen water; steam = water that has become a hot gas; fire = the heat and light of something that burns; smoke = the grey gas that comes from a fire; sand = very small pieces of rock; gold = a yellow metal that is worth a lot;
iron = a strong metal used for tools; diamond = a very hard and clear precious stone; salt = a white powder that makes food taste better; tree = a tall plant with a trunk and branches; leaf = a flat green part of a plant; flower = the colourful part of a plant;
rose = a flower with a sweet smell and thorns; grass = a green plant that covers the ground; seed = a small part of a plant from which a new plant grows; root = the part of a plant under the ground; mushroom = a plant-like thing with a round cap that grows in forests;
cactus = a plant with thorns that grows in deserts; spring = the season after winter when plants begin to grow; summer = the warmest season of the year; autumn = the season when leaves fall; winter = the coldest season of the year; night = the dark time when people sleep;
morning = the early part of the day; evening = the last part of the day; day = a time of twenty-four hours; week = a time of seven days; month = one of the twelve parts of a year; year = a time of twelve months; hour = a time of sixty minutes; minute = a time of sixty seconds;
bread = a food made of flour and baked in an oven; butter = a soft yellow food made from milk; cheese = a food made from milk; milk = a white drink that comes from cows; egg = a food that comes from a hen; rice = small white grains that people eat;
soup = a hot liquid food; salad = a cold dish of raw vegetables; pizza = a flat round bread with tomato and cheese; chocolate = a sweet brown food made from cocoa; honey = a sweet food made by bees; sugar = a sweet white powder; apple = a round fruit that grows on trees;
banana = a long yellow fruit; orange = a round sweet fruit with a thick skin; lemon = a yellow fruit that tastes sour; tomato = a soft red fruit that is eaten as a vegetable; potato = a vegetable that grows under the ground; carrot = a long orange vegetable;
onion = a vegetable with a strong smell that can make you cry; tea = a hot drink made from dried leaves; coffee = a hot dark drink made from roasted beans; juice = a drink made from fruit; cake = a sweet food that is baked; breakfast = the first meal of the day; lunch = the meal in the middle of the day;
dinner = the main meal in the evening; fruit = the sweet part of a plant that holds the seeds; vegetable = a plant that people eat; teacher = a person who helps others learn; doctor = a person who helps people who are ill; nurse = a person who takes care of ill people;
farmer = a person who grows food and keeps animals; baker = a person who bakes bread and cakes; cook = a person who makes meals; pilot = a person who flies airplanes; sailor = a person who works on a ship; firefighter = a person who puts out fires; judge = a person who decides in a court;
lawyer = a person who knows the law and gives advice; carpenter = a person who makes things of wood; plumber = a person who repairs water pipes; electrician = a person who works with electricity; engineer = a person who designs and builds machines; scientist = a person who studies nature;
astronaut = a person who travels into space; painter = a person who makes pictures; musician = a person who plays music; writer = a person who writes books; poet = a person who writes poems; actor = a person who plays in films or plays; dancer = a person who dances;
librarian = a person who works in a library; gardener = a person who takes care of a garden; tailor = a person who makes clothes; mechanic = a person who repairs machines; dentist = a doctor for teeth; vet = a doctor for animals; programmer = a person who writes computer programs;
king = a man who rules a country; queen = a woman who rules a country; friend = a person whom you like and trust; neighbour = a person who lives near you; child = a young person; baby = a very young child; family = a group of parents and children; brother = a boy with the same parents;
sister = a girl with the same parents; uncle = the brother of your mother or father; aunt = the sister of your mother or father; guest = a person who visits you; student = a person who learns at a school; soldier = a person who serves in an army; hero = a person who does something very brave;
gravity = the force that pulls things to the ground; light = what lets us see things; heat = the energy that makes things warm; electricity = the energy that makes lamps and machines work; atom = a very small part of which everything is made; cell = the smallest living part of a plant or an animal;
heart = the organ that pumps blood through the body; brain = the organ in the head that we think with; lung = an organ that we breathe with; stomach = the organ that breaks down our food; blood = the red liquid in the body; bone = a hard part inside the body; skin = the outer cover of the body; eye = the part of the body that we see with;
ear = the part of the body that we hear with; nose = the part of the face that we smell with; tongue = the part of the mouth that we taste with; hand = the part of the body at the end of the arm; foot = the part of the body at the end of the leg; dream = pictures and stories in your mind while you sleep; memory = the power to remember things;
habit = a thing that you do often without thinking; happiness = the feeling of being glad; anger = a strong feeling when something is wrong; fear = the feeling you have when there is danger; courage = the strength to do something although you are afraid; kindness = being friendly and helpful to others;
honesty = telling the truth; patience = being able to wait calmly; friendship = the bond between friends; freedom = being able to do what you want; peace = a time without war; war = a time of fighting between countries; law = a rule that everybody in a country must follow; vote = a choice made in an election; tax = money that people pay to the government;
job = the work that you do for money; holiday = a time when you do not work; birthday = the day on which a person was born; game = something that you play for fun; sport = an activity for which you move your body; music = sounds that are nice to hear; song = music with words; poem = a short text that often rhymes; story = a text about things that happened;
joke = something funny that makes people laugh; language = the words that people use to speak to each other; word = a group of letters that means something; sentence = a group of words that says something; alphabet = all the letters of a language; verb = a word for something that you do; noun = a word for a person, a place or a thing;
number = a word or sign that says how many; circle = a round shape; square = a shape with four equal sides; triangle = a shape with three sides; vaccine = a medicine that protects you from an illness; virus = a very small thing that can make you ill; medicine = something that helps you get well; internet = a network that connects computers all over the world;
email = a letter that is sent by computer; password = a secret word that lets you in; program = a list of steps that a computer follows; algorithm = a list of steps that solves a problem; data = facts and numbers; recycling = using old things to make new ones; pollution = dirt in the air, the water or the ground; weather = how warm, wet or windy it is outside;
city = a very large town; village = a small place with a few houses; country = a land with its own government; road = a way for cars and people; wall = the side of a room or a building; roof = the top cover of a house; kitchen = a room for cooking; bedroom = a room for sleeping; bathroom = a room for washing; brave = not afraid of danger; kind = friendly and helpful to others;
lazy = not wanting to work; clever = quick to understand; hungry = needing food; thirsty = needing something to drink; tired = needing rest; happy = feeling glad; sad = feeling unhappy; angry = feeling strongly that something is wrong; afraid = feeling fear; polite = behaving well towards others; honest = telling the truth; quiet = making little noise;
ancient = very old; empty = with nothing inside; famous = known by many people; dangerous = able to hurt you; expensive = costing a lot of money; cheap = costing little money; huge = very large; tiny = very small; rare = not seen often; fragile = easy to break
"""
_VERBS = """
run = move fast on your feet; walk = move slowly on your feet; swim = move through water; fly = move through the air; jump = push yourself up from the ground; sleep = rest with closed eyes; eat = take food into your mouth; drink = take a liquid into your mouth; learn = get to know new things;
teach = help somebody learn; read = understand written words; write = put words on paper; speak = say words; listen = try to hear; help = make something easier for somebody; build = make something from parts; break = make something fall into pieces; repair = make a broken thing work again; buy = get something for money; sell = give something for money;
borrow = take something and give it back later; forgive = stop being angry with somebody; laugh = make a happy sound; cry = have tears in your eyes; promise = say that you will surely do something; discover = find something that nobody knew; invent = make something for the first time; travel = go to other places; measure = find out how big something is;
share = give a part of what you have to others; freeze = become ice; boil = become so hot that it turns into steam; melt = become liquid; hide = go where nobody can see you; explain = make something clear; decide = make a choice; forget = not remember; whisper = speak very quietly
"""


def _rows(text: str) -> dict[str, str]:
    pairs = (item.partition("=") for item in " ".join(text.split()).split(";"))
    return {word.strip(): gloss.strip() for word, _, gloss in pairs if gloss}


GLOSSES = _rows(_TEXT)
VERBS = _rows(_VERBS)
"""Adjectives are the glosses that are no noun phrase."""
ADJECTIVES = frozenset(
    "brave kind lazy clever hungry thirsty tired happy sad angry afraid polite honest quiet ancient empty famous dangerous expensive cheap huge tiny rare fragile".split()
)
MASS = frozenset(
    """money rain snow wind thunder lightning fog water ice steam fire smoke sand gold iron salt grass bread butter cheese milk rice soup salad pizza chocolate honey sugar tea coffee juice
    breakfast lunch dinner gravity light heat electricity blood skin memory happiness anger fear courage kindness honesty patience friendship freedom peace war music medicine data recycling
    pollution weather spring summer autumn winter night morning evening""".split()
)
"""Nouns that stand without an article; those in THE stand with "the"."""
THE = frozenset("sun moon sky heart brain stomach tongue internet ocean".split())
